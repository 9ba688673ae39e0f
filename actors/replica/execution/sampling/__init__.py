"""Draws the next tokens of a batch: parameters, grammars, allowed tokens, and budgets of reasoning."""
