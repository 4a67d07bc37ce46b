"""What users import: ``store`` and ``prefix_cache`` are the surface; ``local`` and ``channel`` reach the node."""
