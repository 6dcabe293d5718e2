"""What all dialects share: fields, content parts, errors, and one exchange from its request to its last byte."""
