"""This box's ceilings for a model: its disk, its page cache, its memory and its processors, measured one by one."""
