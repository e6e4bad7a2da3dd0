"""Thousands of networks trained as one program."""
