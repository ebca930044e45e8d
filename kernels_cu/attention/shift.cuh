// The shift c of a row in J u: a number of its own that is taken off what its scores change by, before that is rounded.
#pragma once

// The mean over the first tile with more of the row's weight than this is its c; what comes before has c = 0. That
// leaves out c * (its weight) * V, which rounding P to 16 bits outweighs by far. Other types round little enough for
// any weight.
constexpr float NO_WEIGHT = sizeof(In) == 2 ? 0x1p-20f : 0;
