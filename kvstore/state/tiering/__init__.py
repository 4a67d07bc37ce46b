"""Decisions about copies: what is saved to the lower tier, loaded into the upper tier, or moved to empty an extent."""
