// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Number writes a number for a reader: 10,000, 0.25.
func Number(v float64) string {
	digits := 0
	if a := math.Abs(v); a < 100 && a != math.Trunc(a) {
		digits = max(0, 2-int(math.Floor(math.Log10(a))))
		if digits > 6 {
			return fmt.Sprintf("%.1e", v)
		}
	}
	s := strconv.FormatFloat(v, 'f', digits, 64)
	if strings.Contains(s, ".") {
		return strings.TrimRight(strings.TrimRight(s, "0"), ".")
	}
	neg := strings.HasPrefix(s, "-")
	s = strings.TrimPrefix(s, "-")
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	if neg {
		return "-" + s
	}
	return s
}

type scale struct {
	least float64
	per   float64
	name  string
}

var scales = map[string][]scale{
	"s":   {{1, 1, "s"}, {1e-3, 1e-3, "ms"}, {1e-6, 1e-6, "µs"}, {0, 1e-9, "ns"}},
	"B":   {{1e6, 1e6, "MB"}, {1e3, 1e3, "kB"}, {0, 1, "B"}},
	"B/s": {{1e9, 1e9, "GB/s"}, {1e6, 1e6, "MB/s"}, {0, 1e3, "kB/s"}},
}

// Value writes a figure in its unit: 0.000214 s as 214 µs.
func Value(v float64, unit string) string {
	switch unit {
	case "":
		return Number(short(v))
	case "%":
		return Number(short(v)) + " %"
	}
	for _, s := range scales[unit] {
		if math.Abs(v) >= s.least {
			return Number(short(v/s.per)) + " " + s.name
		}
	}
	return Number(short(v)) + " " + unit
}

// short leaves three digits, which is more than a busy machine is good for.
func short(v float64) float64 {
	if v == 0 || math.IsNaN(v) || math.IsInf(v, 0) {
		return v
	}
	if math.Abs(v) >= 100 {
		return math.Round(v)
	}
	p := math.Pow(10, 2-math.Floor(math.Log10(math.Abs(v))))
	return math.Round(v*p) / p
}

// Ratio writes how many times a is of b.
func Ratio(a, b float64) string {
	if b == 0 {
		return "–"
	}
	r := a / b
	if r >= 10 {
		return Number(math.Round(r)) + "×"
	}
	return Number(math.Round(r*100)/100) + "×"
}
