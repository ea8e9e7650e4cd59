"""Measuring: our runtimes, other engines, and the tables that compare them."""
