"""Measurements: each says how it was made, results/ holds the figures."""
