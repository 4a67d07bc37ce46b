"""The conductor sends each request where it is answered soonest. ``state`` decides without a socket or a clock, and
``shell`` carries the decisions out.
"""
