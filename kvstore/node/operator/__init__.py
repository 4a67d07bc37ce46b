"""What operators ask for: calls, filters of pages, explanations of lookups, statistics, metrics."""
