"""Functions over the rows of arrays that choose what computes them; they are named in `fusejax`."""
