"""The intermediate representation: digits, layouts, domains, TensorViews, Exprs and fusions."""
