"""What is true of a finished program, kind of action by kind of action.

The rules know the specification and the actions, and nothing of the passes that placed these: a pass that is wrong must
not prove itself right. So they import none of them (tests/schedule/test_rules.py). Together they leave one place to
every action.
"""
