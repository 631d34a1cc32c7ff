"""What runs in the zygote and in the boxes: standard library only, so that a bare interpreter starts it in milliseconds.

The zygote imports this folder as a package of its own, never through `rollmill`; nothing here knows the owner's modules.
"""
