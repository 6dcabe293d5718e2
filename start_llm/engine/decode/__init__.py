"""How the rows that decode get their next tokens: batches, drafts, sampling, grammars."""
