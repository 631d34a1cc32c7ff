"""The agent: the first process of every box, the words it speaks, and its owner's end of them.

`wire` and `plain` use the standard library alone, because a bare interpreter inside a box imports them.
"""
