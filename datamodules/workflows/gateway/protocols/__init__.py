"""Providers' wire formats: one file a protocol, and what they share."""
