"""Sequences cut over ranks: what they tell each other, so that attention sees whole ones."""
