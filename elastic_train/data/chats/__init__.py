"""Chats and instructions as training data: rows to messages, messages to tokens and labels."""
