"""Tool-call formats, one family a file; `shared` holds those that are recognised whatever the family."""
