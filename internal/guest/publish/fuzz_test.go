// SPDX-License-Identifier: Apache-2.0

//go:build linux

package publish

import (
	"encoding/json"
	"testing"

	"github.com/fairlead/fairlead/internal/config/policy"
	"github.com/fairlead/fairlead/internal/config/yamltree"
	"github.com/fairlead/fairlead/internal/guest/peer"
	"github.com/fairlead/fairlead/internal/port"
)

func FuzzRequest(f *testing.F) {
	f.Add([]byte(`{"nonce":"n","port":8080}`))
	f.Add([]byte(`{"nonce":"n","toHost":true,"port":80,"as":8080}`))
	f.Add([]byte(`{"connect":7,"failed":"x","refused":true}`))
	f.Add([]byte(`{"port":-1}`))
	n, err := yamltree.Parse("policy", []byte("- match: {name: web}\n  guestPorts: [8080]\n  hostPorts: [8080-8090]\n"))
	if err != nil {
		f.Fatal(err)
	}
	var allow policy.Policy
	if err := new(yamltree.Decoder).Decode(n, &allow, "entries"); err != nil {
		f.Fatal(err)
	}
	s := New(Options{Policy: allow})
	web, other := peer.Client{Container: port.Owner{Kind: port.OwnerContainer, Name: "web"}}, peer.Client{Container: port.Owner{Kind: port.OwnerContainer, Name: "x"}}
	f.Fuzz(func(t *testing.T, b []byte) {
		var q request
		if json.Unmarshal(b, &q) != nil {
			return
		}
		if s.allowed(other, q) == nil {
			t.Errorf("another container gets %+v", q)
		}
		if s.allowed(web, q) == nil && (q.ToHost && (q.As < 8080 || q.As > 8090) || !q.ToHost && q.Port != 8080) {
			t.Errorf("gets %+v", q)
		}
	})
}
