"""The wire contract of Draftline: generated messages and stubs, one subpackage per API version."""
