"""Cases: small JSON recipes of attention problems, and the arrays that they stand for."""
