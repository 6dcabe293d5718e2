"""This machine as a program of this user sees it: folders, ports, locks."""
