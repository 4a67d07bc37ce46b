"""The conductor: a request goes where it is answered soonest. ``state`` decides without a socket or a clock, ``shell``
performs.
"""
