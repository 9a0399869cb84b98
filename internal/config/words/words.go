// SPDX-License-Identifier: Apache-2.0

// Package words names the words that a value may be, and the one that was meant.
package words

import (
	"fmt"
	"strings"
)

// Check returns an error that names a value and what is allowed, unless it is one of the words.
func Check(got string, words ...string) error {
	for _, w := range words {
		if got == w {
			return nil
		}
	}
	return fmt.Errorf("%q: want %s%s", got, OneOf(words), Suggest(got, words))
}

// OneOf returns "a, b or c".
func OneOf(words []string) string {
	switch n := len(words); n {
	case 0:
		return "nothing"
	case 1:
		return words[0]
	default:
		return strings.Join(words[:n-1], ", ") + " or " + words[n-1]
	}
}

// Suggest returns ` (did you mean "x"?)` for the most similar word, or "" if none is similar.
func Suggest(got string, words []string) string {
	best := MostSimilar(got, words)
	if best == "" {
		return ""
	}
	return fmt.Sprintf(" (did you mean %q?)", best)
}

// MostSimilar returns the most similar word, or "" if none is similar.
func MostSimilar(got string, words []string) string {
	best, distance := "", min(3, 1+len(got)/3)
	for _, w := range words {
		if d := edits(strings.ToLower(got), strings.ToLower(w)); d < distance || d == distance && best == "" {
			best, distance = w, d
		}
	}
	return best
}

// edits is the Levenshtein distance, with a swap of neighbours counted as one edit. A
// text longer than any word of ours is distant from all of them.
func edits(a, b string) int {
	if len(a) > 64 {
		return len(a)
	}
	var before []int
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		next := make([]int, len(b)+1)
		next[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			next[j] = min(row[j]+1, next[j-1]+1, row[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				next[j] = min(next[j], before[j-2]+1)
			}
		}
		before, row = row, next
	}
	return row[len(b)]
}
