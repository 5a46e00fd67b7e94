"""Chats and instructions as training data: rows become messages, messages become tokens and labels."""
