"""The bodies that clients send and get, as structs."""
