"""Generated from ``proto/`` by ``make proto``; `make check` compares. Import nothing from here that must start fast."""
