"""Which tasks an explore batch takes: selectors, pure in seed, step and what was known of the tasks."""
