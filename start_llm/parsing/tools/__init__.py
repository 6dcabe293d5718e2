"""Tool-call formats, one family a file; `hermes.SHARED` is recognised whatever the family."""
