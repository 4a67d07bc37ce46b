"""Decisions about copies between tiers: what is saved below, loaded above, or moved to empty an extent."""
