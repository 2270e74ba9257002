"""The delta rule and gates by channel on JAX; docs/delta-rule.md has the equations (D1) to (D17)."""
