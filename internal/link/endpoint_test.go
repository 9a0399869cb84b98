// SPDX-License-Identifier: Apache-2.0

package link

import (
	"strings"
	"testing"
)

func TestParseEndpoint(t *testing.T) {
	for in, want := range map[string]Endpoint{
		"unix:///run/fairlead/link.sock": {Network: NetworkUnix, Path: "/run/fairlead/link.sock"},
		"unix:///run//a/../link?x=%20":   {Network: NetworkUnix, Path: "/run/link?x=%20"},
		"vsock://3:1023":                 {Network: NetworkVsock, CID: 3, Port: 1023},
		"vsock://host:1023":              {Network: NetworkVsock, CID: 2, Port: 1023},
		"vsock://local:1023":             {Network: NetworkVsock, CID: 1, Port: 1023},
		"vsock://any:4294967294":         {Network: NetworkVsock, CID: CIDAny, Port: 1<<32 - 2},
		"hvsock://wsl:1023":              {Network: NetworkHvsock, Machine: "wsl", Port: 1023},
		"hvsock://{E0E16197-DD56-4A10-9195-5EE7A155A838}:1": {
			Network: NetworkHvsock, Machine: "e0e16197-dd56-4a10-9195-5ee7a155a838", Port: 1,
		},
	} {
		got, err := ParseEndpoint(in)
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v", in, got, err)
		}
		again, err := ParseEndpoint(got.String())
		if err != nil || again != got {
			t.Errorf("%s became %s: %v", in, got, err)
		}
	}
	for in, says := range map[string]string{
		"":                                    "want unix:///PATH or vsock://CID:PORT",
		"/run/x.sock":                         "want unix:///PATH",
		"tcp://127.0.0.1:1":                   `"tcp"`,
		"unix://run/x.sock":                   "not absolute",
		"unix://@x":                           "abstract",
		"unix:///run/\x00x":                   "abstract",
		"unix://":                             "not absolute",
		"unix:///run/":                        "names no file",
		"unix:///run/..":                      "names no file",
		"unix:///" + strings.Repeat("x", 120): "shorter",
		"vsock://2":                           "no port",
		"vsock://x:1":                         `"x"`,
		"vsock://4294967296:1":                "4294967296",
		"vsock://2:0":                         "port 0",
		"vsock://2:4294967295":                "port 4294967295",
		"vsock://2:-1":                        `"-1"`,
		"vsock://2:1:2":                       `"1:2"`,
		"hvsock://wsl":                        "hvsock://wsl:PORT",
		"hvsock://wsl:0":                      "port 0",
		"hvsock://Ubuntu:1023":                `"wsl"`,
	} {
		_, err := ParseEndpoint(in)
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v", in, err)
		}
	}
	var e Endpoint
	if err := e.UnmarshalText([]byte("vsock://2:7")); err != nil || e.Port != 7 {
		t.Error(e, err)
	}
	if b, err := e.MarshalText(); err != nil || string(b) != "vsock://2:7" {
		t.Error(string(b), err)
	}
}

func FuzzParseEndpoint(f *testing.F) {
	for _, s := range []string{"unix:///run/x", "vsock://2:1023", "vsock://any:1", "unix://@", "vsock://:", "hvsock://wsl:1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		e, err := ParseEndpoint(s)
		if err != nil {
			return
		}
		if again, err := ParseEndpoint(e.String()); err != nil || again != e {
			t.Fatalf("%q is %+v, then %+v, %v", s, e, again, err)
		}
	})
}
