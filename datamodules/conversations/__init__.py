"""Recorded conversations: as token arrays or text, imported from the files of others, chosen by task."""
