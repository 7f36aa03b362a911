"""What tests share: problems, the oracle, error budgets, the backends and devices at hand."""
