"""The outer server as others reach it: servicers over an `OuterPort`."""
