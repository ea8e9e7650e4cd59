"""Proofs that speculation changes nothing, run on the user's own target and drafter."""
