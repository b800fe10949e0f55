"""Reads exported programs (``.pt2``) as data: a graph in JSON and raw weights, nothing that is code."""
