// SPDX-License-Identifier: Apache-2.0

//go:build linux && vm

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"testing"
)

// TestChaos makes one run in an emulated machine, without engines, and prints its result. Unless it is given
// minutes, it breaks nothing.
func TestChaos(t *testing.T) {
	seed, err := strconv.ParseUint(cmp.Or(os.Getenv(seedVariable), "1"), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	minutes, err := strconv.ParseFloat(cmp.Or(os.Getenv(minutesVariable), "0"), 64)
	if err != nil {
		t.Fatal(err)
	}
	r, err := runChaos(t.Context(), seed, minutes, nil, true)
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Printf("%s%s\n", resultMark, b)
	if r.failed() {
		t.Error(r)
	}
}
