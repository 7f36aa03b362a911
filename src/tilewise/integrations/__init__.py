"""Tilewise inside other libraries."""
