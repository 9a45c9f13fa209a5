"""The version of this package: processes of one service compare it before they exchange anything."""

VERSION = "0.1.0"
