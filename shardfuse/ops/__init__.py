"""Operations: the table of pointwise ops, dtype promotion, builders of records, and evaluation by torch."""
