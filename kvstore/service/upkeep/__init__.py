"""Work in the background: copies between tiers, the scan of NVMe, the scrubber."""
