"""`axolotl supertune …`: the command line, one file a command. Options and printing only; the rooms do the work."""
