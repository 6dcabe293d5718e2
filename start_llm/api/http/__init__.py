"""Bytes to requests and back. Knows no model API."""
