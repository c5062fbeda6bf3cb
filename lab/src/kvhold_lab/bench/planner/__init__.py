"""`kvhold bench planner`: is planning ever slower than always loading or always computing?"""
