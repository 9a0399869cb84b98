// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"testing"

	"github.com/fairlead/fairlead/internal/notices"
)

func TestNoticesAreUpToDate(t *testing.T) {
	want, err := generate("../..")
	if err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	if err := notices.Write(&got); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got.Bytes(), want) {
		t.Error("internal/notices is out of date: run make docs")
	}
	for _, text := range []string{
		"github.com/libp2p/go-yamux/v5 v", "Mozilla Public License", "github.com/Microsoft/go-winio v",
		"GPL-2.0-only OR BSD-2-Clause", "GNU GENERAL PUBLIC LICENSE", "Copyright 2009 The Go Authors",
	} {
		if !bytes.Contains(want, []byte(text)) {
			t.Errorf("the notices lack %q", text)
		}
	}
}
