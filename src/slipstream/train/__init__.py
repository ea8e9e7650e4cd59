"""Training of Medusa and EAGLE-3 heads for a user's own model."""
