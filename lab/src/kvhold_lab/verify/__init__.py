"""`kvhold verify`: does a model answer the same with kvhold, and is its loaded KV bit-exact?"""
