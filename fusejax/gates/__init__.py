"""Gates: compiled functions held against limits and recorded budgets."""
