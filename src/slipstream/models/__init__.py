"""Where models come from, and how transformers runs one as a functional step."""
