"""Carries out a conductor's decisions: finds engines and nodes, reads their reports, sends requests, streams
answers.
"""
