"""What operators ask: admin calls, selections of pages, explanations, metrics."""
